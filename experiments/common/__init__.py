"""Code that several programs share: configs, the screen, folders of runs."""
