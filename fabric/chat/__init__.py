"""Chat messages as tokens, exactly: what a policy made is never encoded again as if it had made that.

messages.py checks messages and compares copies of them; forms.py knows how families of models write tool calls;
answers.py reads an answer as a message; control.py breaks up what only looks like a control token; template.py renders
messages and encodes the text; conversation.py decides what continues and what branches.
"""
