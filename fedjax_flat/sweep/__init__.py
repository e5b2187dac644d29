"""Many runs of one question: methods, settings to choose among, seeds; each cell a run folder."""
