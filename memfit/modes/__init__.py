"""The two modes: script mode, whose loop is the user's, and step mode, whose step is memfit's."""
