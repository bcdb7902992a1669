"""What requests to the API may say, and what answers look like; nothing of how they travel."""
