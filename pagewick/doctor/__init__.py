"""What this machine is, and what a model needs of it, before anything is loaded. Nothing here runs a model."""
