// Command abi is the C ABI of Switchyard, for the Python package: built with -buildmode=c-shared it is the shared
// library that switchyard loads. It runs nothing as a program.
//
// The rules of the ABI: objects are integers that are never used twice; every call returns a code of switchyard.h and
// leaves the error's text with the calling thread; no call lets a panic out; nothing calls back. Waiting is bounded by the
// caller, who may ask again, so that it can look after its signals. The functions of pools are torch's to call, and have
// the types that it wants.
package main

func main() {}
