"""The layout that a program brings along: found, erased before rules decide, or kept beside them."""
