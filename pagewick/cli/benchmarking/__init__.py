"""What `pagewick bench` is made of: workloads, who is measured, and what the numbers mean."""
