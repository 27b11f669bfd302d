"""Settings: frozen dataclasses, each field declared once, and the flags that are made of them."""
