"""Maps raw ids, any integers or text, to the rows of their table.

`fit` gives a fixed row to every id that was seen often enough. `growing` gives
ids rows during training, and reassigns the rows of unused ids.
"""
