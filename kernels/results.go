package kernels

// ResultParts is the most parts of a Results.
const ResultParts = 14

// ResultPart is a piece of what a dispatch has left, on its way to memory of the caller. Its words are those of 4 bytes.
type ResultPart struct {
	From, To Buffer
	// Row is the bytes of a row where the part has one for each row of the output: as many of them as came are copied, as far as To has room.
	// 0: To is as long as what is copied of From, however many rows came.
	Row int64
	// Columns is how many stretches From and To consist of, each as long as the others and with Row bytes for each row; 0 is 1.
	Columns int
	// Fills has Behind in all words of To behind the last row; without a row, in all words if the dispatch has failed on this rank.
	Fills  bool
	Behind uint32
	// Rows says that these are the output's rows. They come first among the parts.
	Rows bool
	// State says that this is the routing part of a handle's State. If the dispatch has failed, what is written is a routing by which no
	// token has gone anywhere, or one that calls refuse.
	State bool
}

// Results is one launch that copies what a dispatch has left on this rank, in stream order. No other rank takes part. Of a dispatch that has
// failed no row has come.
type Results struct {
	Handle int // of DispatchBounds.Handles
	// Failed says that the dispatch is known to have failed. An engine also finds out by itself, until it has told the failure.
	Failed bool
	// Taken says that the launch comes right behind its dispatch, which is Taken, too, and had Tokens: it may begin while that runs, and take
	// rows as they come.
	Taken  bool
	Tokens int
	// Rows is where the number of rows is: the last of the handle's Offsets, or of those of a routing.
	Rows Buffer
	// Parts has Count of them.
	Parts [ResultParts]ResultPart
	Count int
	// Blocks bounds the multiprocessors that the launch takes, as in DispatchCall.
	Blocks int
	Launched
}

// Operation is the name of the call.
func (*Results) Operation() string { return OpResults.String() }

// Add appends a part, unless nothing is to be written.
func (r *Results) Add(p ResultPart) {
	if p.To.Bytes > 0 {
		r.Parts[r.Count] = p
		r.Count++
	}
}
