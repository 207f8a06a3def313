// Cases of Vercel's AI SDK. Prints one JSON line for each.
//
//     node cases.mjs BASE_URL MODEL
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const [root, name] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "moestro", baseURL: `${root}/v1`, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true,
});
const model = provider(name);
const prompt = "Write a Python function `close`: Close the file.";
// A model of this size does not end a list of calls by itself.
const providerOptions = { moestro: { parallel_tool_calls: false } };
const common = { model, prompt, maxRetries: 0, maxOutputTokens: 800, providerOptions };
const Weather = z.object({
  city: z.enum(["Paris", "Ulm", "Kyoto"]),
  degrees: z.number().int().min(-40).max(50),
  note: z.string().max(12),
});
const City = z.object({ city: z.enum(["Paris", "Ulm", "Kyoto"]) });
const weather = tool({
  description: "Tell the weather of a city.",
  inputSchema: City,
  execute: async ({ city }) => `It rains in ${city}.`,
});

function expect(condition, what) {
  if (!condition) throw new Error(what);
}

const cases = {
  generateText: async () => {
    const { text, usage } = await generateText({ ...common, maxOutputTokens: 24 });
    expect(text.length > 0, "no text");
    expect(usage.outputTokens > 0, "no usage");
  },
  streamText: async () => {
    let text = "";
    const result = streamText({ ...common, maxOutputTokens: 24, onError: ({ error }) => { throw error; } });
    for await (const piece of result.textStream) text += piece;
    expect(text.length > 0, "no text");
    expect((await result.usage).outputTokens > 0, "no usage");
  },
  generateObject: async () => {
    const { object } = await generateObject({ ...common, schema: Weather });
    Weather.parse(object);
  },
  streamObject: async () => {
    const result = streamObject({ ...common, schema: Weather, onError: ({ error }) => { throw error; } });
    for await (const _ of result.partialObjectStream);
    Weather.parse(await result.object);
  },
  "tools: auto": async () => {
    const { text, toolCalls } = await generateText({ ...common, tools: { weather } });
    expect(text.length > 0 || toolCalls.length > 0, "neither text nor calls");
  },
  "tools: required": async () => {
    const { toolCalls, toolResults } = await generateText({ ...common, tools: { weather }, toolChoice: "required" });
    expect(toolCalls.length > 0 && toolResults.length > 0, "no calls");
    City.parse(toolCalls[0].input);
  },
  "tools: required, streamed": async () => {
    const result = streamText({
      ...common, tools: { weather }, toolChoice: { type: "tool", toolName: "weather" },
      onError: ({ error }) => { throw error; },
    });
    await result.consumeStream();
    City.parse((await result.toolCalls)[0].input);
  },
  "loop: a tool is called, then the answer": async () => {
    const { steps } = await generateText({
      ...common, tools: { weather }, stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    });
    expect(steps.length === 2 && steps[0].toolResults.length > 0, "no second step");
    expect(steps[1].text.length > 0, "no answer");
  },
};

for (const [each, run] of Object.entries(cases)) {
  let reason = "";
  try {
    await run();
  } catch (error) {
    reason = `${error.name}: ${error.message}`.slice(0, 400) || "failed";
  }
  console.log(JSON.stringify({ case: each, passed: reason === "", reason }));
}
