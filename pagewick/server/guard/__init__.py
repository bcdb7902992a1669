"""Who may ask, how much at a time, and how slowly."""
