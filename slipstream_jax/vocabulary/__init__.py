"""Raw ids, of any number or text, to the rows of their table.

`fit` gives every id that was seen often enough a row, once and for all;
`growing` gives ids rows while training, and takes them back.
"""
