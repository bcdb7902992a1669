"""Parts of `pagewick chat`: models that respond, the conversation, its commands, the terminal."""
