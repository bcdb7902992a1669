"""What a sequence may say next: TokenConstraints, made of what EngineRequest.constraint says."""
