"""Results of measurements as a document that one can hand on: HTML and Markdown. Imports no torch."""
