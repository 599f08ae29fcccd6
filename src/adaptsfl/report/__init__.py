"""What people see: tables, figures and pages made from plans and records."""
