"""TokenConstraints, which restrict what a sequence may continue with, made from EngineRequest.constraint."""
