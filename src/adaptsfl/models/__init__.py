"""Models: split any torch module into layers and measure what every cut of it costs."""
