"""What requests for text have in common, in whichever dialect they come: their values, their start, what is kept."""
