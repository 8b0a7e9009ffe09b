"""Layouts: which mesh axes each logical axis of the models is sharded over."""
