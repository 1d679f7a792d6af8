"""Vocabularies map raw ids, any integers or text, to the rows of a table.

`counted` gives a fixed row to every id that was seen often enough. `hashed`
gives rows to hashes. `growing` gives ids rows during training, and reassigns
the rows of unused ids. `types.TableVocabulary` is what all of them can do.
"""
