package kernels

// RollCallBounds is the family of roll calls.
type RollCallBounds struct {
	Size int // ranks
}

// Family is "rollcall".
func (*RollCallBounds) Family() string { return "rollcall" }

// RollCall is one launch in which every rank signals every other and waits for all of them.
type RollCall struct{ Launched }

// Operation is "roll call".
func (*RollCall) Operation() string { return "roll call" }
