"""Charts, tables, sentences and pages. Imported only when something is drawn."""
