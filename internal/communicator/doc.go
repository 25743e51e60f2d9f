// Package communicator is the life that Exchanger, Reducer and Dispatcher have in common: ranks open one together, calls
// are checked, ordered and launched, one that fails half-way leaves it broken, and ranks close it together. What is moved,
// and how, is for its owner and the heap's engine.
package communicator
