"""`report.html`: what happened in one run, or in several beside each other, in one file that needs no network."""

REPORT = "report.html"
