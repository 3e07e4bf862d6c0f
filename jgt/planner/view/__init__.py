"""The views of a plan: tables in the terminal, an HTML page, two plans side by side, and a lock."""
