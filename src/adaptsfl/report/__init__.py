"""Tables, figures and pages for people, made from plans and records."""
