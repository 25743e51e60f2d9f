package comm

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// mails are one Mail of every rank.
func mails(gs []*Group) []*Mail {
	out := make([]*Mail, len(gs))
	for r, g := range gs {
		out[r] = g.Mail()
	}
	return out
}

func TestWordsComeInOrderByRankAndTopic(t *testing.T) {
	eachWorld(t, 3, func(t *testing.T, gs []*Group) {
		ctx := testContext(t)
		ms, others := mails(gs), mails(gs)
		for i := range byte(3) {
			for _, from := range []int{0, 2} {
				for topic := range uint32(2) {
					word := []byte{byte(from), byte(topic), i}
					require.NoError(t, ms[from].Send(1, topic, word))
					word[0] = 99 // it was copied
				}
			}
		}
		require.NoError(t, others[0].Send(1, 0, []byte("another")))
		for topic := range uint32(2) {
			for _, from := range []int{2, 0} {
				for i := range byte(3) {
					w, err := ms[1].Receive(ctx, from, topic)
					require.NoError(t, err)
					require.Equal(t, []byte{byte(from), byte(topic), i}, w.Data)
				}
			}
		}
		w, err := others[1].Receive(ctx, 0, 0)
		require.NoError(t, err)
		require.Equal(t, "another", string(w.Data))

		long := make([]byte, MaxWord)
		require.NoError(t, ms[1].Send(0, 1<<32-1, long))
		w, err = ms[0].Receive(ctx, 1, 1<<32-1)
		require.NoError(t, err)
		require.Len(t, w.Data, MaxWord)
	})
}

func TestWordsCarryDescriptors(t *testing.T) {
	onOneHost(t, 2, func(t *testing.T, gs []*Group) {
		ms := mails(gs)
		r, w, err := os.Pipe()
		require.NoError(t, err)
		defer r.Close()
		require.NoError(t, ms[1].Send(0, 4, nil, int(w.Fd())))
		require.NoError(t, ms[1].Send(0, 4, []byte("behind")))
		require.NoError(t, w.Close())
		got, err := ms[0].Receive(testContext(t), 1, 4)
		require.NoError(t, err)
		require.Len(t, got.FDs, 1)
		f := os.NewFile(uintptr(got.FDs[0]), "pipe")
		_, err = f.WriteString("hello")
		require.NoError(t, errors.Join(err, f.Close()))
		b := make([]byte, 9)
		n, err := r.Read(b)
		require.NoError(t, err)
		require.Equal(t, "hello", string(b[:n]))
		got, err = ms[0].Receive(testContext(t), 1, 4)
		require.NoError(t, err)
		require.Equal(t, "behind", string(got.Data))

		// one that nobody receives is closed with the Mail, or with the group
		for _, end := range []func(){ms[0].Close, func() { gs[0].Close() }} {
			r, w, err := os.Pipe()
			require.NoError(t, err)
			require.NoError(t, ms[1].Send(0, 4, nil, int(w.Fd())))
			require.NoError(t, w.Close())
			end()
			_, err = r.Read(b)
			require.Error(t, err, "all ends for writing are closed")
			require.NoError(t, r.Close())
		}
	})
}

func TestF3_WordsThatAreRefused(t *testing.T) {
	eachWorld(t, 4, func(t *testing.T, gs []*Group) {
		ms := mails(gs)
		for _, peer := range []int{-1, 1, 4} {
			require.ErrorIs(t, ms[1].Send(peer, 0, []byte("word")), ErrInvalid)
			_, err := ms[1].Receive(testContext(t), peer, 0)
			require.ErrorIs(t, err, ErrInvalid)
		}
		require.ErrorIs(t, ms[1].Send(0, 0, nil), ErrInvalid)
		require.ErrorIs(t, ms[1].Send(0, 0, make([]byte, MaxWord+1)), ErrInvalid)
		require.ErrorIs(t, ms[1].Send(0, 0, []byte("both"), 0), ErrInvalid)
		require.ErrorContains(t, ms[1].Send(0, 0, nil, -1), "duplicate descriptor -1")
		if gs[1].Topology().Hosts > 1 {
			err := ms[1].Send(3, 0, nil, 0)
			require.ErrorIs(t, err, ErrUnsupported)
			require.ErrorContains(t, err, "rank 3 on host 1")
		}
	})
}

func TestF1_AWordThatDoesNotComeIsWaitedForUntilTheContextEnds(t *testing.T) {
	eachWorld(t, 3, func(t *testing.T, gs []*Group) {
		ms := mails(gs)
		ctx, cancel := context.WithTimeout(testContext(t), time.Millisecond)
		defer cancel()
		_, err := ms[0].Receive(ctx, 2, 0)
		requirePeer(t, err, 2, ErrTimeout)
		// what is there is taken, whatever the context
		require.NoError(t, ms[2].Send(0, 0, []byte("late")))
		require.NoError(t, ms[2].Send(0, 1, []byte("later")))
		_, err = ms[0].Receive(testContext(t), 2, 1)
		require.NoError(t, err)
		w, err := ms[0].Receive(ctx, 2, 0)
		require.NoError(t, err)
		require.Equal(t, "late", string(w.Data))
		require.NoError(t, gs[0].Err())
	})
}

// receiving waits in a goroutine for a word of a topic on which none comes.
func receiving(receive func(context.Context, int, uint32) (Word, error), ctx context.Context, peer int) chan error {
	done := make(chan error, 1)
	go func() {
		_, err := receive(ctx, peer, 7)
		done <- err
	}()
	return done
}

func TestF2_WhoWaitsForAWordOfALostRankHearsOfIt(t *testing.T) {
	eachWorld(t, 3, func(t *testing.T, gs []*Group) {
		ctx := testContext(t)
		ms := mails(gs)
		require.NoError(t, ms[1].Send(0, 7, []byte("last")))
		require.NoError(t, ms[1].Send(0, 8, []byte("mark")))
		_, err := ms[0].Receive(ctx, 1, 8)
		require.NoError(t, err)
		of := receiving(ms[2].Receive, ctx, 1)
		last := receiving(ms[2].ReceiveLast, ctx, 1)
		beside := receiving(ms[2].Receive, ctx, 0)
		gs[1].Kill()
		requirePeer(t, <-of, 1, ErrPeerLost)
		requirePeer(t, <-last, 1, ErrPeerLost)
		requirePeer(t, <-beside, 1, ErrPeerLost)
		<-gs[0].Done()
		w, err := ms[0].Receive(ctx, 1, 7)
		require.NoError(t, err, "it came before its rank was lost")
		require.Equal(t, "last", string(w.Data))
		var lost error // another rank may have said so before this rank's own connection ends
		require.Eventually(t, func() bool { lost = ms[0].Send(1, 7, []byte("none")); return lost != nil }, soon, time.Millisecond)
		requirePeer(t, lost, 1, ErrPeerLost)

		if where := gs[0].Topology(); where.HostOf(2) == 0 { // the two that live, on one host, can still end what they have begun
			waits := receiving(ms[0].ReceiveLast, ctx, 2)
			require.NoError(t, ms[2].Send(0, 7, []byte("done")))
			require.NoError(t, <-waits)
		}
	})
}

func TestF2_WhoWaitsForAWordOfWhoLeavesHearsOfIt(t *testing.T) {
	eachWorld(t, 3, func(t *testing.T, gs []*Group) {
		ctx := testContext(t)
		ms := mails(gs)
		of, last := receiving(ms[0].Receive, ctx, 1), receiving(ms[0].ReceiveLast, ctx, 1)
		require.NoError(t, gs[1].Close())
		requirePeer(t, <-of, 1, ErrPeerLost)
		requirePeer(t, <-last, 1, ErrPeerLost)
		require.NoError(t, gs[0].Err(), "a word holds up nobody but its receiver")

		own := receiving(ms[0].ReceiveLast, ctx, 2)
		ms[0].Close()
		require.ErrorIs(t, <-own, ErrClosed)
		ms[0].Close()
		require.ErrorIs(t, ms[0].Send(2, 0, []byte("word")), ErrClosed)
		require.NoError(t, ms[2].Send(0, 0, []byte("dropped")))
		require.NoError(t, gs[2].Close())
		require.ErrorIs(t, ms[2].Send(0, 0, []byte("word")), ErrClosed)
		require.ErrorIs(t, gs[2].Mail().Send(0, 0, []byte("word")), ErrClosed)
	})
}

func TestWordsAreTakenBack(t *testing.T) {
	eachWorld(t, 3, func(t *testing.T, gs []*Group) {
		ctx := testContext(t)
		ms := mails(gs)
		for topic := range uint32(3) {
			require.NoError(t, ms[0].Send(1, topic, []byte("first")))
			require.NoError(t, ms[0].Send(1, topic, []byte("second")))
			require.NoError(t, ms[1].Send(0, topic, []byte("the other way")))
		}
		require.NoError(t, ms[2].Send(1, 0, []byte("of another rank")))
		_, err := ms[1].Receive(ctx, 0, 1)
		require.NoError(t, err)
		for topic, want := range []bool{true, true, true, false} { // 3: nothing was sent
			recalled, err := ms[0].Recall(ctx, 1, uint32(topic))
			require.NoError(t, err)
			require.Equal(t, want, recalled, topic)
			_, ok, err := ms[1].Take(0, uint32(topic))
			require.NoError(t, err)
			require.False(t, ok, "it was taken back")
			recalled, err = ms[0].Recall(ctx, 1, uint32(topic))
			require.NoError(t, err)
			require.False(t, recalled, "once")
		}
		for topic := range uint32(3) {
			w, err := ms[0].Receive(ctx, 1, topic)
			require.NoError(t, err)
			require.Equal(t, "the other way", string(w.Data))
		}
		w, err := ms[1].Receive(ctx, 2, 0)
		require.NoError(t, err)
		require.Equal(t, "of another rank", string(w.Data))

		require.NoError(t, ms[0].Send(1, 0, []byte("again")))
		w, err = ms[1].Receive(ctx, 0, 0)
		require.NoError(t, err)
		require.Equal(t, "again", string(w.Data))
		recalled, err := ms[0].Recall(ctx, 1, 0)
		require.NoError(t, err)
		require.False(t, recalled, "it was received")

		require.NoError(t, ms[0].Send(1, 0, []byte("again")))
		ms[1].Close()
		recalled, err = ms[0].Recall(ctx, 1, 0)
		require.NoError(t, err)
		require.True(t, recalled, "nobody receives it")
		_, err = ms[0].Recall(ctx, 0, 0)
		require.ErrorIs(t, err, ErrInvalid)
		_, _, err = ms[0].Take(3, 0)
		require.ErrorIs(t, err, ErrInvalid)
	})
}

func TestDescriptorsOfWordsThatAreTakenBackAreClosed(t *testing.T) {
	onOneHost(t, 2, func(t *testing.T, gs []*Group) {
		ms := mails(gs)
		r, w, err := os.Pipe()
		require.NoError(t, err)
		defer r.Close()
		require.NoError(t, ms[0].Send(1, 0, nil, int(w.Fd())))
		require.NoError(t, w.Close())
		recalled, err := ms[0].Recall(testContext(t), 1, 0)
		require.NoError(t, err)
		require.True(t, recalled)
		_, err = r.Read(make([]byte, 1))
		require.Error(t, err, "all ends for writing are closed")
	})
}

// One who waits for an answer ends with its context, and hears it later.
func TestF1_AnAnswerToWhoTakesWordsBackIsNotLost(t *testing.T) {
	eachWorld(t, 2, func(t *testing.T, gs []*Group) {
		ms := mails(gs)
		require.NoError(t, ms[0].Send(1, 0, []byte("word")))
		over, cancel := context.WithCancel(testContext(t))
		cancel()
		recalled, err := ms[0].Recall(over, 1, 0)
		if err != nil { // the peer had no time to answer
			requirePeer(t, err, 1, context.Canceled)
			recalled, err = ms[0].Recall(testContext(t), 1, 0)
		}
		require.NoError(t, err)
		require.True(t, recalled)
	})
}

func TestF2_WhoTakesAWordBackFromALostRankHearsOfIt(t *testing.T) {
	eachWorld(t, 3, func(t *testing.T, gs []*Group) {
		ctx := testContext(t)
		ms := mails(gs)
		require.NoError(t, ms[0].Send(2, 0, []byte("word")))
		require.NoError(t, ms[0].Send(1, 0, []byte("word")))
		gs[1].Kill()
		<-gs[0].Done()
		_, err := ms[0].Recall(ctx, 1, 0)
		requirePeer(t, err, 1, ErrPeerLost)
		if where := gs[0].Topology(); where.HostOf(2) == 0 {
			recalled, err := ms[0].Recall(ctx, 2, 0)
			require.NoError(t, err, "the group has failed, and the peer lives")
			require.True(t, recalled)
		}
		require.NoError(t, gs[2].Close())
		_, err = ms[0].Recall(ctx, 2, 0)
		requirePeer(t, err, 2, ErrPeerLost)
	})
}
