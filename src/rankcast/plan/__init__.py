"""Planning, in numpy and plain integers: who sends what, when, and where it lies. Nothing here moves a byte."""
