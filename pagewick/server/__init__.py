"""HTTP only: parse, call, format. Imports no torch."""
