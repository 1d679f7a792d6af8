"""Row stores on a disk: records in an unnamed file that is not kept."""
