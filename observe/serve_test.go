package observe

import (
	"log/slog"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/flight"
)

// pipes is a listener whose connections the test has made.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) { return <-p, nil }
func (p pipes) Close() error              { return nil }
func (p pipes) Addr() net.Addr            { return nil }

// Connections that ask nothing keep no other out: the oldest goes.
func TestSilentConnectionsCostNothing(t *testing.T) {
	const silent = 2 * connections
	l := make(pipes, silent)
	b := &bounded{Listener: l, pace: newPace(0)}
	b.freed.L = &b.mu
	var ours []net.Conn
	for range silent {
		here, there := net.Pipe()
		ours = append(ours, here)
		l <- there
	}
	var last net.Conn
	for i := range silent {
		c, err := b.Accept()
		require.NoError(t, err)
		if i == 1 {
			c.(*counted).busy.Store(true) // it is being answered
		}
		last = c
	}
	require.Len(t, b.open, connections)
	for i, c := range ours {
		gone := i <= silent-connections && i != 1
		if gone {
			_, err := c.Read(make([]byte, 1))
			require.Error(t, err, i)
		}
	}
	require.NoError(t, last.Close())
	require.NoError(t, last.Close())
	require.Len(t, b.open, connections-1)
}

// A group that has taken ranks in keeps the labels of its first ranks, and the group before has no metrics any more.
func TestLabelsSurviveNewcomers(t *testing.T) {
	old, next := flight.New(1, 3), flight.New(1, 3)
	old.Failed("lost", 0, -1, net.ErrClosed)
	next.Seats = []int{1, 2, 0}
	next.Succeeds(old)
	for _, r := range []*flight.Rank{old, next} {
		defer r.Add(&flight.Part{Waited: func(add func(flight.Wait, time.Duration)) {
			add(flight.Wait{Operation: "dispatch", Peer: 2}, time.Second)
		}})()
		r.Recorder("world", 1, []int{0, 1, 2}, "host").Begin("alltoallv", "direct", 8, flight.NotStaged, flight.NoStream, false, []int64{8, 0, 16}, []int64{8, 0, 16}).Finished(nil)
	}
	var text strings.Builder
	require.NoError(t, WriteMetrics(&text, Snapshot(), OpenMetrics))
	for _, want := range []string{
		`switchyard_sent_bytes_total{rank="2",host="0",peer="0"} 16`, `switchyard_sent_bytes_total{rank="2",host="0",peer="1"} 8`,
		`switchyard_waited_seconds_total{rank="2",host="0",operation="dispatch",peer="0"} 1`, `switchyard_faults_total{rank="2",host="0",kind="lost",culprit="0"} 1`,
	} {
		require.Contains(t, text.String(), want)
	}
	require.NotContains(t, text.String(), `rank="1"`)
}

// Metrics that were asked for and are not to be had are a finding.
func TestMissingMetricsAreAFinding(t *testing.T) {
	taken, err := net.Listen("tcp", "localhost:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, taken.Close()) }()
	err = listen("localhost:"+strconv.Itoa(taken.Addr().(*net.TCPAddr).Port-1), 1, slog.New(slog.DiscardHandler))
	require.ErrorContains(t, err, "that of SWITCHYARD_METRICS and this rank's place on its host, is taken")
	require.ErrorContains(t, listen("nowhere", 0, slog.New(slog.DiscardHandler)), `SWITCHYARD_METRICS is "nowhere", want [HOST]:PORT or a path`)
	kinds, texts := kindsOf(Merge(fourRanks(func(r *Rank) {
		if r.Rank == 2 {
			r.NoMetrics = err.Error()
		}
	})))
	require.Equal(t, "metrics", kinds)
	require.Contains(t, texts, "rank 2, process 102, serves no metrics: port ")
}

// A failure is held back until it has been scraped, once, and where nobody scrapes it is not.
func TestAFailureIsHeldBackForAScrape(t *testing.T) {
	s := &scrapes{}
	s.await(time.Now(), time.Hour) // nobody has ever asked
	s.note(time.Now().Add(-time.Minute))
	at, held := time.Now(), make(chan struct{})
	go func() {
		s.await(at, time.Hour)
		close(held)
	}()
	s.note(at) // whose answer may be of a snapshot from before
	select {
	case <-held:
		t.Fatal("the scrape has not seen the failure")
	case <-time.After(10 * time.Millisecond):
	}
	s.note(at.Add(2 * snapshotEvery))
	<-held
	s.await(at.Add(time.Hour), time.Millisecond) // it does not wait for ever
}
