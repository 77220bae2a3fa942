// Loaded first by every node process of a test command. Where `node --test` runs a file, it records for the host what
// node's own runner reports about each test: the file's results go to the runner on standard output, where the code
// under test prints too.
'use strict';

const fs = require('node:fs');

const { entries, getOwnPropertyDescriptor, getOwnPropertyDescriptors } = Object;
const MODULES = ['node:assert', 'assert', 'node:assert/strict', 'assert/strict', 'node:test'];
const THIS_OPTION = `--require=${__filename}`;
const alone = process.execArgv.some((word) => /^--(experimental-)?test-isolation=none$/.test(word));
const file = process.env.CARREL_RECORDER_NOTES;

if (file && (process.env.NODE_TEST_CONTEXT || alone)) {
  install(file);
}

function install(file) {
  // Processes that the tests start do not get the recorder.
  delete process.env.CARREL_RECORDER_NOTES;
  const left = (process.env.NODE_OPTIONS || '').split(' ').filter((word) => word && word !== THIS_OPTION);
  if (left.length) process.env.NODE_OPTIONS = left.join(' ');
  else delete process.env.NODE_OPTIONS;

  const { writeSync } = fs;
  const { stringify } = JSON;
  const notes = fs.openSync(file, 'a');
  const run = `${process.pid}-${Date.now()}`;
  const send = (what) => writeSync(notes, `${stringify({ run, ...what })}\n`);

  const [major, minor] = process.versions.node.split('.').map(Number);
  if (major < 20 || (major === 20 && minor < 12)) {
    send({ event: 'unable' }); // It does not pass the outcome of a test to hooks.
    return;
  }
  const runner = require('node:test');
  const known = parts();
  send({ event: 'begun', program: process.argv[1] });
  runner.afterEach((test) => {
    if (typeof test.passed !== 'boolean') return;
    send({ event: 'test', id: test.fullName, outcome: test.passed ? 'passed' : 'failed' });
  });
  runner.after(() => {
    const what = changed(known);
    if (what) send({ event: 'changed', what });
    send({ event: 'canary', failed: failing() });
    send({ event: 'finished' });
  });
}

// The functions that tests use, by owner and name, as they are before the project's code is loaded.
function parts() {
  const found = [];
  const add = (name, owner, depth) => {
    for (const [key, { value }] of entries(getOwnPropertyDescriptors(owner))) {
      if (typeof value !== 'function' || key === 'constructor') continue;
      found.push({ name: `${name}.${key}`, owner, key, value });
      if (depth > 0 && value !== owner) add(`${name}.${key}`, value, depth - 1);
    }
  };
  for (const name of MODULES) {
    const value = require(name);
    found.push({ name, value });
    add(name, value, 1);
  }
  return found;
}

// The name of the first function that was replaced. `require` must still return the same objects, too.
function changed(known) {
  const other = known.find(({ name, owner, key, value }) =>
    owner ? getOwnPropertyDescriptor(owner, key)?.value !== value : require(name) !== value);
  return other && other.name;
}

// Whether assertions that must fail do fail; if not, the assertions were changed.
function failing() {
  const assert = require('node:assert');
  const wrong = [
    () => assert(false),
    () => assert.ok(false),
    () => assert.equal(1, 2),
    () => assert.strictEqual(1, 2),
    () => assert.deepEqual([1], [2]),
    () => assert.deepStrictEqual([1], [2]),
    () => assert.strict.equal(1, 2),
    () => assert.notStrictEqual(1, 1),
    () => assert.throws(() => {}),
    () => assert.match('a', /b/),
    () => assert.fail(),
  ];
  return wrong.every((check) => {
    try {
      check();
    } catch {
      return true;
    }
    return false;
  });
}
