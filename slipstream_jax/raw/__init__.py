"""Raw data in public formats: each file makes a `RawData` of one of them."""
