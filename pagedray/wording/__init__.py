"""Values, numbers and names as error messages and logs show them."""
