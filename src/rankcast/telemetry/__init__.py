"""What a push tells people while it runs and afterwards: stages, progress and reports, as plain records."""
