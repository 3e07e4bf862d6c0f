"""What a person sees of a plan: tables and bars in the terminal, an HTML page, two plans side by side, and a lock.

Read `table.py` first. `page.py` and `drawings.py` make the page, `lock.py` and `compare.py` put a plan beside another one.
"""
