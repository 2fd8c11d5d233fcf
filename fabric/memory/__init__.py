"""Every port in memory: the twin of `bus`, held to the same contract tests."""
