"""The corpus of the demo model, written by this project: chats about Pagewick, small talk, small tasks, tool calls."""

from training.corpus.document import Document, Segment, render
from training.corpus.mix import build_documents
from training.corpus.questions import Question, held_out_questions

__all__ = ["Document", "Question", "Segment", "build_documents", "held_out_questions", "render"]
