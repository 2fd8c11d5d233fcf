"""The model API of sessions: OpenAI's and Anthropic's protocols over fabric/ports/sessions.py."""
