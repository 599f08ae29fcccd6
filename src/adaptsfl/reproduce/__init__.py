"""The paper's figures and claims, from the recipes in recipes/paper: trained, drawn and judged."""
