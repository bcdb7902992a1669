"""What the server says of itself: metrics, log lines, traces."""
