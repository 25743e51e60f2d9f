package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/internal/proctest"
)

// folder has what all tests share: a text and a model of it.
var folder string

// The test binary is also the program, which starts itself.
func TestMain(m *testing.M) {
	proctest.Play(proctest.Parts{"serve": func([]string) int { main(); return 0 }, "client": client})
	var err error
	if folder, err = os.MkdirTemp("", "switchyard-serve-test-"); err != nil {
		panic(err)
	}
	code := m.Run()
	_ = os.RemoveAll(folder)
	os.Exit(code)
}

// poem is a file with a text that is learned in no time.
func poem(t *testing.T) string {
	path := filepath.Join(folder, "poem.txt")
	line := "a rose is a rose is a rose, and the train on the rails is never the train of the rail\n"
	require.NoError(t, os.WriteFile(path, []byte(strings.Repeat(line, 400)), 0o644))
	return path
}

var learned sync.Once

// model is a file with a model of the poem.
func modelFile(t *testing.T) string {
	path := filepath.Join(folder, "model")
	learned.Do(func() {
		c := config.Defaults()
		c.Ranks, c.Steps, c.Hidden, c.Inner, c.Embed, c.Batch, c.Text, c.Save = 2, 200, 16, 16, 8, 61, poem(t), path
		require.NoError(t, learn(t.Context(), c, io.Discard))
	})
	return path
}

// server is one in this process, whose ranks are goroutines.
type server struct {
	*front
	url   string
	stop  context.CancelFunc
	ended chan error
	log   *bytes.Buffer
	t     *testing.T
}

func startServer(t *testing.T, args ...string) *server {
	t.Helper()
	o, err := parse(append([]string{"-model", modelFile(t), "-ranks", "3"}, args...), io.Discard)
	require.NoError(t, err)
	at, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.Background())
	s := &server{url: "http://" + at.Addr().String(), stop: stop, ended: make(chan error, 1), log: new(bytes.Buffer), t: t}
	s.front, err = prepare(o, slog.New(slog.NewTextHandler(s.log, nil)))
	require.NoError(t, err)
	go func() { s.ended <- s.serve(ctx, at) }()
	t.Cleanup(func() {
		stop()
		<-s.ended
		if t.Failed() {
			t.Log(s.log)
		}
	})
	s.until(func(c condition) bool { return c.State == ready })
	return s
}

// end stops the server and returns what serve returned.
func (s *server) end() error {
	s.stop()
	err := <-s.ended
	s.ended <- nil
	return err
}

func (s *server) health() (c condition) {
	r, err := http.Get(s.url + "/healthz")
	require.NoError(s.t, err)
	defer r.Body.Close()
	require.NoError(s.t, json.NewDecoder(r.Body).Decode(&c))
	require.Equal(s.t, c.State == ready, r.StatusCode == http.StatusOK)
	return c
}

// until waits for a condition of the server, and asks without a request, which on a busy machine takes longer than some conditions last.
func (s *server) until(ok func(c condition) bool) {
	s.t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		c := s.condition()
		if ok(c) {
			return
		}
		require.True(s.t, time.Now().Before(end), "%+v", c)
	}
}

// occupy has endless requests run or wait, until their clients leave.
func (s *server) occupy(n int) (leave func()) {
	ctx, leave := context.WithCancel(s.t.Context())
	for range n {
		const tokens = 1 << 20
		require.NoError(s.t, s.submit(&request{ctx: ctx, text: make([]byte, s.window), left: tokens, next: make(chan byte, tokens)}))
	}
	return leave
}

// post sends a request.
func (s *server) post(ctx context.Context, body string) *http.Response {
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+"/v1/completions", strings.NewReader(body))
	require.NoError(s.t, err)
	r, err := http.DefaultClient.Do(q)
	require.NoError(s.t, err)
	return r
}

// ask returns the text of an answer, and what was said of an error.
func (s *server) ask(body string) (text, refused string, code int) {
	r := s.post(s.t.Context(), body)
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	require.NoError(s.t, err)
	var a struct {
		answer
		refusal
	}
	if strings.HasPrefix(r.Header.Get("Content-Type"), "text/event-stream") {
		for part := range strings.SplitSeq(strings.TrimSuffix(string(b), "\n\n"), "\n\n") {
			data, ok := strings.CutPrefix(part, "data: ")
			require.True(s.t, ok, part)
			if data == "[DONE]" {
				continue
			}
			a.Choices = nil
			require.NoError(s.t, json.Unmarshal([]byte(data), &a))
			for _, c := range a.Choices {
				text += c.Text
			}
		}
		if a.Error.Message == "" {
			require.True(s.t, bytes.HasSuffix(b, []byte("data: [DONE]\n\n")))
		}
		return text, a.Error.Message, r.StatusCode
	}
	require.NoError(s.t, json.Unmarshal(b, &a), string(b))
	if len(a.Choices) > 0 {
		text = a.Choices[0].Text
		require.Equal(s.t, "length", *a.Choices[0].Finish)
		require.Equal(s.t, a.Usage.Total, a.Usage.Prompt+a.Usage.Completion)
	}
	return text, a.Error.Message, r.StatusCode
}

func TestAnswers(t *testing.T) {
	s := startServer(t)
	whole, _, _ := s.ask(`{"prompt": "the train on the", "max_tokens": 6, "temperature": 0}`)
	require.Equal(t, " rails", whole, "the model knows the poem")
	for _, seed := range []int{1, -2} {
		body := fmt.Sprintf(`{"prompt": "the rail", "max_tokens": 100, "temperature": 2, "seed": %d, "stream": `, seed)
		text, _, _ := s.ask(body + "false}")
		streamed, _, _ := s.ask(body + "true}")
		require.Equal(t, text, streamed, "a stream is the same answer in parts")
		require.GreaterOrEqual(t, len(text), 100)
	}
	short, _, code := s.ask(`{"prompt": ""}`)
	require.Equal(t, 200, code)
	require.GreaterOrEqual(t, len(short), fewTokens)

	for body, want := range map[string]string{
		`{"prompt": "x", "max_tokens": 0}`:                 "max_tokens is 0, want 1 to 4096",
		`{"prompt": "x", "max_tokens": 5000}`:              "max_tokens is 5000",
		`{"prompt": "x", "temperature": -1}`:               "temperature is -1",
		`{"prompt": "x", "stop": "."}`:                     `unknown field "stop"`,
		`{"prompt": ["x"]}`:                                "cannot unmarshal",
		`{"prompt": "` + strings.Repeat("x", 2<<20) + `"}`: "too large",
		`no`:                "invalid character",
		`{"prompt": "x"} y`: "behind its object: invalid character",
		`{"prompt": "x"}{}`: "more follows behind its object",
	} {
		_, refused, code := s.ask(body)
		require.Contains(t, refused, want)
		require.Contains(t, []int{http.StatusBadRequest, http.StatusRequestEntityTooLarge}, code)
	}
	r, err := http.Get(s.url + "/v1/completions")
	require.NoError(t, err)
	require.NoError(t, r.Body.Close())
	require.Equal(t, http.StatusMethodNotAllowed, r.StatusCode)
	require.NoError(t, s.end())
}

// A queue that is full is told at once, and requests that wait are answered.
func TestFullQueueIsTold(t *testing.T) {
	s := startServer(t, "-ranks", "1", "-batch", "1", "-queue", "2")
	leave := s.occupy(1)
	s.until(func(c condition) bool { return c.Running == 1 })
	var all sync.WaitGroup
	for range 2 {
		all.Go(func() {
			text, refused, _ := s.ask(`{"prompt": "x", "max_tokens": 100}`)
			require.Empty(t, refused)
			require.GreaterOrEqual(t, len(text), 100)
		})
	}
	s.until(func(c condition) bool { return c.Waiting == 2 })
	r := s.post(t.Context(), `{"prompt": "x"}`)
	var refused refusal
	require.NoError(t, json.NewDecoder(r.Body).Decode(&refused))
	require.NoError(t, r.Body.Close())
	require.Equal(t, http.StatusTooManyRequests, r.StatusCode)
	require.Equal(t, "1", r.Header.Get("Retry-After"))
	require.Equal(t, "too many requests wait: 1 run and 2 wait", refused.Error.Message)
	leave()
	all.Wait()
	_, _, code := s.ask(`{"prompt": "x"}`)
	require.Equal(t, http.StatusOK, code)
}

// A request ends with its client, whether it runs or waits.
func TestRequestEndsWithItsClient(t *testing.T) {
	s := startServer(t, "-batch", "1", "-ranks", "1")
	for _, stream := range []bool{true, false} {
		ctx, leave := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for range 3 {
			all.Go(func() {
				q, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.url+"/v1/completions",
					strings.NewReader(fmt.Sprintf(`{"prompt": "x", "max_tokens": 4096, "stream": %v}`, stream)))
				if r, err := http.DefaultClient.Do(q); err == nil {
					_, _ = io.Copy(io.Discard, r.Body)
					r.Body.Close()
				}
			})
		}
		s.until(func(c condition) bool { return c.Running == 1 && c.Waiting == 2 })
		before := s.health().Tokens
		leave()
		all.Wait()
		s.until(func(c condition) bool { return c.Running == 0 && c.Waiting == 0 })
		require.Less(t, s.health().Tokens-before, 2*4096, "nobody works for clients that have gone")
	}
}

// Clients that do not read their streams, and connections without a request, hold up nobody: the ranks make the answers all the same.
func TestSlowReadersHoldUpNobody(t *testing.T) {
	s := startServer(t, "-ranks", "2")
	for range 50 {
		c, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
		require.NoError(t, err)
		defer c.Close()
	}
	const each = 1500
	for range 8 {
		r := s.post(t.Context(), fmt.Sprintf(`{"prompt": "x", "max_tokens": %d, "stream": true}`, each))
		defer r.Body.Close()
	}
	_, refused, code := s.ask(`{"prompt": "x", "max_tokens": 20}`)
	require.Equal(t, http.StatusOK, code, refused)
	s.until(func(c condition) bool { return c.Running == 0 && c.Tokens == 8*each+20 })
}

// What is under way when the server is told to stop is answered. Others are refused, with the reason.
func TestStopAnswersWhatIsUnderWay(t *testing.T) {
	s := startServer(t, "-ranks", "1", "-batch", "2")
	leave := s.occupy(1) // so that the server does not end before it has refused
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			text, refused, _ := s.ask(`{"prompt": "x", "max_tokens": 600}`)
			require.Empty(t, refused)
			require.GreaterOrEqual(t, len(text), 600)
		})
	}
	s.until(func(c condition) bool { return c.Running == 2 && c.Waiting == 3 })
	s.stop()
	s.until(func(c condition) bool { return c.State == stopping })
	_, refused, code := s.ask(`{"prompt": "x"}`)
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.Equal(t, errStopping.Error(), refused)
	leave()
	all.Wait()
	require.NoError(t, s.end())
}

// Requests that take longer than the grace end with the reason.
func TestGraceEnds(t *testing.T) {
	for _, stream := range []bool{true, false} {
		s := startServer(t, "-ranks", "1", "-grace", "20ms")
		var all sync.WaitGroup
		for range 40 {
			all.Go(func() {
				_, refused, _ := s.ask(fmt.Sprintf(`{"prompt": "x", "max_tokens": 4096, "stream": %v}`, stream))
				require.Equal(t, errStopping.Error(), refused)
			})
		}
		s.until(func(c condition) bool { return c.Running == 40 })
		require.NoError(t, s.end())
		all.Wait()
	}
}

// The server says that it is not ready before the ranks have met, and refuses requests then.
// Once it was ready, requests wait for the ranks that replace lost ones.
func TestNotReadyYet(t *testing.T) {
	f := newFront(options{Queue: 1}, joining{}, 8, slog.New(slog.DiscardHandler))
	require.ErrorContains(t, f.submit(&request{ctx: t.Context()}), "the server is starting")
	require.Equal(t, starting, f.condition().State)
	f.lost = 1
	require.NoError(t, f.submit(&request{ctx: t.Context()}))
	require.Equal(t, 1, f.condition().Waiting)
}

func TestCharactersAreNotCut(t *testing.T) {
	for text, want := range map[string]int{"": 0, "a": 1, "é": 2, "a\xc3": 1, "€": 3, "\xe2\x82": 0, "a\xe2": 1, "\xf0\x9f\x98": 0, "\x82\x82\x82\x82": 4, "\xff": 1} {
		require.Equal(t, want, whole([]byte(text)), "%q", text)
	}
}

// A time after which every rank is lost at once is refused before ranks are started.
func TestPeerTimeoutIsMoreThanNothing(t *testing.T) {
	for _, span := range []string{"0", "-1s"} {
		_, err := parse([]string{"-peer-timeout", span}, io.Discard)
		require.ErrorIs(t, err, errUsage)
		require.ErrorContains(t, err, "want more than 0")
	}
}
