"""Chats as samples: messages, templates, and the tokens that count in the loss.

Other rows become text in `datasets/sources`.
"""
