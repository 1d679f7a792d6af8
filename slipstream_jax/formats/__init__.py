"""Raw data in public formats. Each format is a file that makes a `RawData`."""
