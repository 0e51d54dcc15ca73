"""Who is late, and whose fault that is: times that were measured, limits made of them, and where each worker stands."""
