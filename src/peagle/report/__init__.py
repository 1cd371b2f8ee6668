"""Results of measurements as a document to share: HTML and Markdown. Imports no torch."""
