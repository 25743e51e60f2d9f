// Package communicator is the life that Exchanger, Reducer and Dispatcher have in common: ranks open one together, calls
// are checked, ordered and launched, a call that fails half-way leaves it broken, and ranks close it together. Its owner and
// the heap's engine decide what a call moves, and how.
package communicator
