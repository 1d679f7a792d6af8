"""Which examples are kept, with what probability and weight; pure numpy."""
