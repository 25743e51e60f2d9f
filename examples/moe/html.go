package main

func (r *report) writeHTML(path string) error { return nil }
