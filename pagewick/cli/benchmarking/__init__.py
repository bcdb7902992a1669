"""Parts of `pagewick bench`: workloads, the engines and servers that are measured, and their numbers."""
