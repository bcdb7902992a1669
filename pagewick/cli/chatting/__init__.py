"""What `pagewick chat` is made of: who answers, the conversation, the commands, the terminal."""
