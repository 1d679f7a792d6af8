"""What a reproduction's files say, as tables, pictures and sentences: pure."""
