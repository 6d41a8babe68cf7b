"""Distillation from many teachers: who teaches which cell, what they think of a token, and what that is worth."""
